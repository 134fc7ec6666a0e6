#error "dsengine includes core/text.h of the program"
